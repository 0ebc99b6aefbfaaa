"""The comparison: four schedulers on the same programs, one client misbehaving."""
