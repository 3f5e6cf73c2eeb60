"""Everything that depends on SGLang: the pin, launch arguments, the hook ledger and CPU support."""
