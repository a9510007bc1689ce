"""Reading the logs of trainings, drawing them, and the report on one."""
