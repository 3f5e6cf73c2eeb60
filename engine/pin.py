"""The one SGLang release that Prelude's hooks are written and verified against."""

SGLANG_VERSION = "0.5.23"
