"""What Prelude's processes share: configuration, control protocol, telemetry, local supervisor, command line."""
