"""What tests share: tiny models, oracles, cases, hosts and servers; no test stands here."""
