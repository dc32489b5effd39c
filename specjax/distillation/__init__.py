"""Training drafters from their target."""
