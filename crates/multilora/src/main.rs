//! The multilora command line.
fn main() {}
