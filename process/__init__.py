"""What every process needs: lifetime and logging."""
