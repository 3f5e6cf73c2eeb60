"""Brings adapters into host memory: loads from the store or disk, and pushes from routers."""
