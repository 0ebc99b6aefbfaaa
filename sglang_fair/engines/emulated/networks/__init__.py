"""Model classes that SGLang finds by name. It imports every module of this package."""
