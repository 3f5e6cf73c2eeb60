"""Alerts, as data, and the rules file that Prometheus reads."""
