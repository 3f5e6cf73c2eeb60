"""`python -m prelude.bench.evidence`."""

from prelude.bench.evidence import main

main()
