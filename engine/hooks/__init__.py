"""Every place where Prelude reaches into SGLang, as data: `ledger` lists, `installation` applies and proves."""
