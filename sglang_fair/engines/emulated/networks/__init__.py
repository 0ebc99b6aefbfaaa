"""Model classes that SGLang finds by their name; it imports every module of this package."""
