"""Authentication: API keys of tenants, and the signed hop token between the tiers."""
