-- The dashboard's role on Postgres: it can read every table and view, and change nothing.
-- Run once, after `nsa db upgrade`, as the role that owns the tables:
--   psql "$ADMIN_URL" -v password="$DASHBOARD_PASSWORD" -f orchestrator/store/roles.sql
SELECT format('CREATE ROLE nsa_dashboard LOGIN PASSWORD %L', :'password')
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'nsa_dashboard') \gexec
ALTER ROLE nsa_dashboard PASSWORD :'password';
ALTER ROLE nsa_dashboard SET default_transaction_read_only = on;
SELECT format('GRANT CONNECT ON DATABASE %I TO nsa_dashboard', current_database()) \gexec
GRANT USAGE ON SCHEMA public TO nsa_dashboard;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO nsa_dashboard;
-- Tables of later migrations, too.
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO nsa_dashboard;
