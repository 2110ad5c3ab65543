"""The target model, and its forward on a CPU."""
