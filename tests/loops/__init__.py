"""A package, so that its test files may have names that other folders have, too."""
