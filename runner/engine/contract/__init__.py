"""The task contract at run time: load a task, check its members and results, and say which of its errors are whose."""
