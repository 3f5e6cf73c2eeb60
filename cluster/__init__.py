"""Code that Prelude's processes share: configuration, control protocol, agent core, local supervisor."""
