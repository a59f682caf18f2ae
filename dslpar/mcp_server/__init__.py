"""Server of the Model Context Protocol: dslpar's commands as tools of an agent, below one folder."""
