"""`python -m bench.evidence`."""

from bench.evidence import main

main()
