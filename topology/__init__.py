"""The map of regions and the law: round-trip times, places, tenants, where they may go. Pure, but for the loader."""
