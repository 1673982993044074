//! multilora
