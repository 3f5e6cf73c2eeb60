"""All that touches SGLang: the pin, launch arguments, the hook ledger and CPU support."""
