"""The target model, and its forward of few rows on a CPU."""
