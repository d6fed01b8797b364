"""To see and to steer: what the pages, the JSON API and the command line are made of."""
