"""Whatever shows and measures engines. Only programs import it."""
