"""From settings to jobs: expand a command line (`jobs`), check a job's settings (`config`)."""
