"""Events, market beliefs, forecast dates, the temporal split, loaders and synthetic worlds."""
