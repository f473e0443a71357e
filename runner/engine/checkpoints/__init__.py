"""When a run saves, what it keeps, and how it resumes."""
