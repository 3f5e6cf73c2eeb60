"""The load generator: pacing, a streaming client, records, figures, reports. Needs no engine and no torch."""
