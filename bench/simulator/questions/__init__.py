"""What a simulated cluster is asked: each question is a function of the options that returns rows of figures."""
