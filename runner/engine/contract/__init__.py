"""The task contract at run time: load a task, check its members and results, identify its errors."""
