"""What several rooms of tests share: models of an engine, stand-ins, real replicas and clusters, free ports."""
