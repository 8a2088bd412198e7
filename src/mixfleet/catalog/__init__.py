"""Known devices, instance shapes and models; every number with its source."""
