"""What a run stands on: configuration, the Ray session, placement, the engine pool, jobs."""
