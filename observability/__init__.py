"""Dashboards and alerts, generated from the metrics that the code declares."""
