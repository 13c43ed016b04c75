"""What comes from outside: the pins, the clients that fetch, and the wheels held to the grader."""
