"""The notify consumer: takes resumes in, hands them to handlers, and feeds back what became of them."""
