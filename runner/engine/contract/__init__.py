"""The task contract at run time: load a task, check its members and results, and tell its errors from internal ones."""
