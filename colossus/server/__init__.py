"""Parameter servers: requests and replies between workers and servers, and what a server keeps."""
