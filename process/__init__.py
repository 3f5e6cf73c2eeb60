"""What every process needs: how long it lives, how it logs."""
