"""What a run tells while it goes on, under trl's names."""
