"""What tenants may use: limits of rates and of what is in use at a time. Pure of clocks and databases."""
