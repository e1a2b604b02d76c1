"""Rule-based forecasters: baselines on any events, and the teacher of the demo."""
