"""Programs that show and measure engines. No engine imports this package."""
