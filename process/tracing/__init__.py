"""Spans of requests, sent to an OpenTelemetry collector by OTLP. Off unless a process starts it with settings."""
