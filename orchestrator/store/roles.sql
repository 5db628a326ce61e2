-- The dashboard's role on Postgres: it can read every table and view, and change nothing.
-- Run once, after `nsa db upgrade`, as the role that owns the tables, with psql 15 or newer:
--   psql -h HOST -U OWNER -d NAME -f orchestrator/store/roles.sql
-- NSA_DASHBOARD_PASSWORD is the role's password: all users of a host can read the arguments of a process.
\set ON_ERROR_STOP on
\getenv password NSA_DASHBOARD_PASSWORD
\if :{?password}
\else
DO $$ BEGIN RAISE 'NSA_DASHBOARD_PASSWORD: is not set; export the password that nsa_dashboard shall have'; END $$;
\endif
SELECT format('CREATE ROLE nsa_dashboard LOGIN PASSWORD %L', :'password')
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'nsa_dashboard') \gexec
ALTER ROLE nsa_dashboard PASSWORD :'password';
ALTER ROLE nsa_dashboard SET default_transaction_read_only = on;
SELECT format('GRANT CONNECT ON DATABASE %I TO nsa_dashboard', current_database()) \gexec
GRANT USAGE ON SCHEMA public TO nsa_dashboard;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO nsa_dashboard;
-- Tables of later migrations, too.
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO nsa_dashboard;
