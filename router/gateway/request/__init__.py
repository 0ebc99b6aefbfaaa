"""What a client asked: the checked body, its prompt as tokens, and whether another replica could continue it."""
