"""Quotas of tenants: limits of rates and of concurrent use. Clocks and databases are passed in."""
