"""A submission met as the grader and its reviewer meet it, and where its tau stands."""
