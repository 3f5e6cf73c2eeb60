"""The demo whose adapters mean something: a base model that knows several styles, and adapters that choose one."""
