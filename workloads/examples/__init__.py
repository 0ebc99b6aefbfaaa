"""Programs in SGLang's frontend language, against a gateway."""
