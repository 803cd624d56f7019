"""Whatever watches, shows and measures engines. No engine imports it."""
