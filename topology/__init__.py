"""The world and the law: regions, jurisdictions, wire times, tenants, where they may go. Pure, plus a YAML loader."""
